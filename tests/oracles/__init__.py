"""Independent definitions that the library's results are compared with."""
