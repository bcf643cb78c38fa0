"""Every patch of a foreign library lives here: what, for which versions, why, and when it can go."""
