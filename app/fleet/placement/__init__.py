"""What is known of the workers' caches, for policies that place by it: by what was sent where (`prefix`), or by what
the workers tell (`kv`)."""
