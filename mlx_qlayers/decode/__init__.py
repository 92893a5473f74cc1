"""The engine of a step of decoding: capture, graph, rules, emission, caches."""
