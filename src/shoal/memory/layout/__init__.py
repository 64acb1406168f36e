"""Static addresses: where in one arena each block of a step lies, decided before the step runs."""
