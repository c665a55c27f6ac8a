"""One request: read, route, attempt, answer, account."""
