"""The model families, by name. A family is imported only when it is asked for."""
