"""Tests of one running application; a package, so that its fixture ends with it."""
