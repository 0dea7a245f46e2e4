"""From a request's bytes to a body of checked types. Nothing gets past here that is not valid and in range.

FastAPI's own body parameters do less: they take UTF-16 and lone surrogates, read the body before the API key is looked
at, know no 415, one route cannot take JSON as well as a form, and files of a form go to the disk.
"""
