"""One model under one budget: the entries that users call. It imports everything below it; nothing below imports it."""
