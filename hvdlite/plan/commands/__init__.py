"""The subcommands of hvdlite-plan, of tables and of models; here: what both read."""

FILE_MAX = 16 << 20  # bytes


def text(path: str) -> str:
    """What a file says. Raises OSError, ValueError."""
    with open(path, "rb") as file:
        content = file.read(FILE_MAX + 1)
    if len(content) > FILE_MAX:
        raise ValueError(f"{path}: more than {FILE_MAX >> 20} MB [HVD008]")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error} [HVD008]") from None
