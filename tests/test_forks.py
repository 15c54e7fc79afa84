"""Tasks may start processes, in multiprocessing's ways."""

import textwrap

from processes import python


def run(code):
    return python("-c", textwrap.dedent(code))


def test_a_signal_that_meets_a_child_at_its_birth_is_not_lost():
    """The child takes 0.5 s until it has its handlers; the signal comes before."""
    done = run("""
        import multiprocessing, os, time
        os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # hooks run in this order
        from grpo.stop import stop
        with stop.listening():
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,))
            process.start()
            process.terminate()
            process.join(60)
            print(process.exitcode, repr(stop.asked))
    """)
    assert done.stdout == "-15 ''\n" and not done.stderr


def test_a_child_ignores_the_runs_ctrl_c_and_ends_with_the_run():
    done = run("""
        import multiprocessing, os, signal, time
        from grpo.stop import stop
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would ignore it
        with stop.listening():
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,))
            process.start()
            os.killpg(0, signal.SIGINT)
            process.join(0.5)
            print(process.is_alive(), stop.asked, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """)  # ends once no process has its stdout
    assert done.stdout == "True SIGINT\n"


def test_a_child_of_a_thread_outlives_the_thread_and_can_be_terminated():
    """Each reply() is called in a thread of its own, and may keep a process for the next one."""
    done = run("""
        import multiprocessing, threading, time
        from grpo.stop import stop
        context, kept = multiprocessing.get_context("fork"), []
        def reply():
            kept.append(context.Process(target=time.sleep, args=(999,)))
            kept[-1].start()
        with stop.listening():
            for _ in range(2):
                thread = threading.Thread(target=reply)
                thread.start()
                thread.join()
            time.sleep(0.3)
            alive = [process.is_alive() for process in kept]
            for process in kept:
                process.terminate()
                process.join(60)
            print(alive, [process.exitcode for process in kept])
    """)
    assert done.stdout == "[True, True] [-15, -15]\n", done.stderr


def test_a_pool_that_a_task_keeps_does_not_hang_the_end():
    done = run("""
        import multiprocessing
        from grpo.stop import stop
        with stop.listening():
            pools = [multiprocessing.get_context(way).Pool(2) for way in ("fork", "forkserver")]
            print([pool.map(abs, [-1]) for pool in pools])
    """)
    assert done.stdout == "[[1], [1]]\n" and done.returncode == 0, done.stderr


def test_a_child_that_exits_does_not_wait_for_the_watchdog_of_the_time_limit():
    done = run("""
        import os, sys
        from grpo.calls import timely, watchdog
        with timely(20, "a reward"):
            pid = os.fork()
            if not pid:
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert watchdog.ends == float("inf")
    """)
    assert done.stdout == "3\n" and not done.stderr
