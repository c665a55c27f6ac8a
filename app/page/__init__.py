"""The operators' page, `/admin/`: three files that need nothing else, and the stream of what they show."""
