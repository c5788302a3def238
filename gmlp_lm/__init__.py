"""GPT with spatial gating units in place of, or beside, attention."""
