"""What a turn may choose from, and who chooses."""
