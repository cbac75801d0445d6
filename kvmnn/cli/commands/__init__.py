"""One file for each verb: its options, one call of the library, its result printed."""
