"""``extproc check``: a configuration, its engines and its Envoy looked at as they are, each finding with what to do."""
