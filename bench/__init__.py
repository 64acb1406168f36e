"""One module per figure or table: each prints a table, writes JSON and asserts that what it timed is right."""
