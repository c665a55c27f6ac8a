"""Who asks, which session, and the claims that say where it is."""
