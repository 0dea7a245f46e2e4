"""Tests of one running application, and of what readers type to it; a package, so that its fixture ends with it."""
