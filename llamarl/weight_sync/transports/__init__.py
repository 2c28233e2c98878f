"""Transports of weights from trainer ranks to generator ranks. Each file is a transport, and its name is used in
TOML."""
