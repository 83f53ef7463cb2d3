"""The paper's diagnostics (section 3.2, Appendix A) on the reference engine's pair: fold-diagnose.

Each of them takes one input's states and gives plain rows; ``report`` turns rows into estimates, tables and plots.
No diagnostic uses a component of FOLD, except that fold is one of the methods whose offline acceptance is measured.
"""
