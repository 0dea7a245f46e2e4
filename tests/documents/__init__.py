"""Tests of what readers type, on one running application; a package, so that its fixture ends with it."""
