"""The built-in suite: cases of h3-mini's gates C and D, a judge trained for them, and their scores."""
