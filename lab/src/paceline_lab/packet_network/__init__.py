"""A network of packets in virtual time: hosts, leaves, spines, TCP, and the bounded-loss protocol's own code."""
