"""What the operating system tells and grants: the machine's identity, open files, a Python of our own."""
