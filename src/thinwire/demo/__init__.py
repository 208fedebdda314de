"""The demo: a byte-level GPT trained over a slow network, with and without thinwire."""
