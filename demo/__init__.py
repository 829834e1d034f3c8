"""The demo of ``make demo``: the platform on small CPU devices, with real inputs and a check of every answer."""
