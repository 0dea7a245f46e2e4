"""Tests of one running application, and of the documents' commands; a package, so that its fixture ends with it."""
