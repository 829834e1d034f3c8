"""Number types without imports of their own, so that every module can use them."""

Bytes = int
Seconds = float
