"""What a plan is."""
