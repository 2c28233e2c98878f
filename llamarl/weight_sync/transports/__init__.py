"""Ways for weights from trainer ranks to generator ranks. A file is a transport; its name is that in TOML."""
