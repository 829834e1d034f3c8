"""What ``make demo`` runs: the platform on two small CPU devices, real inputs, every answer checked."""
