"""HVD8xx: Options, variables and what is installed.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD801 The value of an option is of the wrong kind
raises: HvdOptionError
cause: An environment variable or a flag holds a text where a number, a switch or one of a few words belongs.
remedy: The text names the variable or flag and what it takes. Correct or unset it; `hvdlite-run --help` lists all
options.

HVD802 The value of an option is out of bounds
raises: HvdOptionError
cause: A number is smaller or greater than the option takes.
remedy: The text names the bound. Correct or unset the variable.

HVD803 Two names of one option disagree
raises: HvdOptionError
cause: An option has hvdlite's name and Horovod's, and both are set, to different values.
remedy: Set only one of them.

HVD804 A variable that hvdlite does not know
raises: a line of rank 0
cause: The environment has a variable `HVDLITE_...` that is none of hvdlite's options, so it has no effect: mostly it is
misspelt.
remedy: The text names the nearest option if there is one; `hvdlite-run --help` lists all. Unset what is left over.

HVD805 A file of an option cannot be written
raises: HvdOptionError, a line of a rank
cause: The file for trials of the autotuner or for steps cannot be written, or stopped taking lines, mostly because the
disk is full. A job that runs goes on without.
remedy: Name a file in a folder that exists and may be written, on a disk with room.

HVD807 A package that this needs is not installed
raises: ModuleNotFoundError, ValueError, a line of hvdlite-run or hvdlite-trace
cause: A part of hvdlite uses a package that it does not require: plotly for reports, PyYAML for `--config-file`,
ml_dtypes for bfloat16 in NumPy, tf_keras for Keras 2.
remedy: Install the package that the text names.

HVD808 The installation of hvdlite is not whole
raises: ImportError
cause: The compiled extension or the ops for TensorFlow are missing or do not fit: a clone of the sources shadows the
installed package, or the wheel was built for another Python or machine.
remedy: Start Python in another folder, or install hvdlite anew (`pip install --force-reinstall hvdlite`); `hvdlite-run
--check-build` shows what is found.

HVD809 horovod was imported before hvdlite could stand for it
raises: ImportError
cause: `hvdlite.as_horovod` makes `import horovod` mean hvdlite, which is too late once the real one is loaded.
remedy: Import `hvdlite.as_horovod` first, or start the job with `hvdlite-run --as-horovod`.

HVD810 A backward pass of PyTorch's compiled autograd
raises: HvdError
cause: `torch._dynamo.config.compiled_autograd` is on (or `torch._dynamo.compiled_autograd` is used as a context), and
backward runs as a compiled program, which does not tell when gradients are complete: clipping would see those of this
rank alone, and weights would drift apart.
remedy: Set `torch._dynamo.config.compiled_autograd = False` on all ranks. `torch.compile` of the model, of the step and
of a function that calls `backward` works without it.
"""

# From 850 on, what the core tells.
_CORE = """
HVD850 There is no plane or algorithm of this name
raises: HvdInitError
cause: `HVDLITE_PLANE` or `HVDLITE_ALGO` names something that this build does not have.
remedy: The text lists what there is. Correct the name, or unset the variable, so that the best one is chosen.

HVD851 An algorithm that deterministic mode does not allow
raises: HvdInitError
cause: `HVDLITE_DETERMINISTIC=1` promises the same bits whatever travels together, and the algorithm that
`HVDLITE_ALGO` asks for adds in an order that depends on that.
remedy: Unset one of the two.
"""

FAMILY = family(8, "Options, variables and what is installed", _PYTHON + _CORE)
