"""Job scripts for schedulers: templates and the code that fills them."""
