"""The runner that keeps a whole step on the device: layers, exits, words and K/V backfill without a host round trip."""
