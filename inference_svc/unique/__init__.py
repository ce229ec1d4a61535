"""``uniqueItems`` of JSON schemas, which the grammars' compiler does not know: what an answer's arrays already have is
masked out of what may follow.

``places`` says where in a schema it counts, ``scan`` follows the text, ``vocabulary`` finds the tokens that matter, and
``matcher`` and ``within`` are what the engine holds. May import ``schema_normalize`` and llguidance, nothing
of the engine.
"""
