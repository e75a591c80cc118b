"""Every part of Kimi K3 in NumPy, as a book that runs."""

__version__ = "0.1.0"
