"""Numbers to numbers: advantage estimators, token weights, reward shaping. No model and no I/O."""
