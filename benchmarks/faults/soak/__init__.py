"""Many requests of every kind, with clients that go away and processes that die: nothing may be lost."""
