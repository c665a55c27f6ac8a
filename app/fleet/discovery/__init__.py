"""Where workers come from: sources say which there are (`file`, `dns`, `records`), operators have the last word
(`marks`), and `Discovery` makes the fleet so."""
