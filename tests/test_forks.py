"""Tasks may start processes, in multiprocessing's ways."""

import textwrap

from processes import python


def run(code):
    return python("-c", textwrap.dedent(code))


def test_a_child_ignores_the_runs_ctrl_c():
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
            process.terminate()
    """)
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
