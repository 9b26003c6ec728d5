"""Vendors' devices without the vendors' hardware; see README.md here."""
