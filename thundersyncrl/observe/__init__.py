"""What people see of a run: live display, metrics, transcripts, curves."""
