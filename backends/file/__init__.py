"""Claims as files in a shared folder."""
