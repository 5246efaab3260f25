"""The laboratory of eigenstep: its command line and all that the studies need. The library does not
import it.

`cli` has the table of commands. Beside it: `demo` and `doctor`; `train`, `data` and `models`
(training real networks); `problems` (what is optimized), `rivals` and `baselines` (what eigenstep
is compared with); `bench`, `cost` and `figures` (the studies), with `study`, the runner of
benchmarks, `behavior`, under which results are kept, `tasks`, `results` and `console`.
"""
