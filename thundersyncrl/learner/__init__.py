"""Model loading, segment forward, boundary adjoints, ledger, work queue and optimizer."""
