"""A simulated vLLM engine that keeps the real engines' rules: admission, ids, KV blocks, hand-over, release, failure.

It computes nothing that a model would, but its KV blocks hold real data: a decoder's text depends on the blocks that it
pulled, so lost, recycled or foreign KV shows as wrong text, as it does on a real pair.
"""
