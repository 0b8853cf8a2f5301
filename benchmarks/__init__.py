"""Measurements of this package beside the stock stack and beside what the machine can do."""
