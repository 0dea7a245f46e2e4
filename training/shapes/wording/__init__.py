"""Free wording of scenes and clips: templates and synonyms as data, and the split that keeps some templates unseen."""
