"""Training on several devices: what travels between them, and how long it takes."""
