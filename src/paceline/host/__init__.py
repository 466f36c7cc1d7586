"""Facts about this host from its kernel (processes, namespaces), and ending threads before the interpreter ends."""
