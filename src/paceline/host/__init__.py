"""What the kernel of this host says about processes, and what must end before the interpreter does."""
