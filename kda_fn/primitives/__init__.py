"""The operations that a KDA layer is made of, each one function with several implementations."""
