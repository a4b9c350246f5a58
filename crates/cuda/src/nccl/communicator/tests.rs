//! A communicator over scripted functions in NCCL's place: what is called after what, and that no answer of theirs makes a wait endless.
use super::*;
use crate::nccl::library::Functions;
use std::cell::RefCell;
use std::ffi::{c_char, c_int};

const INVALID_USAGE: Code = 5;
const REMOTE: Code = 6;
const TIMEOUT: Duration = Duration::from_millis(60);

/// What the functions did and what they answer. Each test has a thread, and so a script, of its own.
struct Script {
    calls: Vec<&'static str>,
    /// Answers of "under way" before each "done"; `None`: it never is.
    polls: Option<u32>,
    polled: u32,
    /// What the background answers in the end.
    background: Code,
    /// Which function refuses, and by what.
    refuses: Option<(&'static str, Code)>,
    version: c_int,
}

thread_local! {
    static SCRIPT: RefCell<Script> = const {
        RefCell::new(Script {
            calls: Vec::new(),
            polls: Some(3),
            polled: 0,
            background: SUCCESS,
            refuses: None,
            version: 23_203,
        })
    };
}

fn script<R>(change: impl FnOnce(&mut Script) -> R) -> R {
    SCRIPT.with_borrow_mut(change)
}

fn calls() -> Vec<&'static str> {
    script(|s| s.calls.clone())
}

fn called(name: &'static str) -> Code {
    script(|s| {
        s.calls.push(name);
        s.polled = 0;
        s.refuses.filter(|(refused, _)| *refused == name).map_or(IN_PROGRESS, |(_, code)| code)
    })
}

unsafe extern "C" fn get_version(version: *mut c_int) -> Code {
    // SAFETY: the caller hands in a live integer.
    unsafe { *version = script(|s| s.version) };
    SUCCESS
}

unsafe extern "C" fn get_unique_id(_: *mut UniqueId) -> Code {
    SUCCESS
}

unsafe extern "C" fn init_rank(
    comm: *mut Handle,
    _: c_int,
    _: UniqueId,
    _: c_int,
    config: *mut Config,
) -> Code {
    // SAFETY: the caller hands in live values; the handle is never followed.
    unsafe {
        assert_eq!(*config.cast::<usize>(), size_of::<Config>());
        *comm = std::ptr::dangling_mut();
    }
    called("init")
}

unsafe extern "C" fn finalize(_: Handle) -> Code {
    called("finalize")
}

unsafe extern "C" fn destroy(_: Handle) -> Code {
    called("destroy")
}

unsafe extern "C" fn abort(_: Handle) -> Code {
    called("abort")
}

unsafe extern "C" fn async_error(_: Handle, state: *mut Code) -> Code {
    let answer = script(|s| {
        s.polled += 1;
        if s.polls.is_some_and(|polls| s.polled > polls) { s.background } else { IN_PROGRESS }
    });
    // SAFETY: the caller hands in a live integer.
    unsafe { *state = answer };
    SUCCESS
}

unsafe extern "C" fn error_string(code: Code) -> *const c_char {
    let words = if code == REMOTE { c"remote process exited" } else { c"invalid usage" };
    words.as_ptr()
}

unsafe extern "C" fn last_error(_: Handle) -> *const c_char {
    std::ptr::null()
}

unsafe extern "C" fn group_start() -> Code {
    called("start")
}

unsafe extern "C" fn group_end() -> Code {
    called("end")
}

unsafe extern "C" fn send(_: *const c_void, _: usize, _: c_int, _: c_int, _: Handle, _: Handle) -> Code {
    called("send")
}

unsafe extern "C" fn recv(_: *mut c_void, _: usize, _: c_int, _: c_int, _: Handle, _: Handle) -> Code {
    called("recv")
}

unsafe extern "C" fn all_gather(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: c_int,
    _: Handle,
    _: Handle,
) -> Code {
    called("gather")
}

const FUNCTIONS: Functions = Functions {
    get_version,
    get_unique_id,
    init_rank,
    finalize,
    destroy,
    abort,
    async_error,
    error_string,
    last_error,
    group_start,
    group_end,
    send,
    recv,
    all_gather,
};

fn join(rank: usize, world: usize) -> Result<Communicator, Error> {
    let library = Library::new(FUNCTIONS, "a script").unwrap();
    let id = library.unique_id()?;
    Communicator::start(&library, std::ptr::null_mut(), (id, Place { rank, world }), TIMEOUT)
}

fn message(way: Way, peer: usize, bytes: usize) -> Message {
    Message { way, peer, address: 0, bytes }
}

fn exchange(communicator: &mut Communicator, messages: &[Message]) -> Result<(), Error> {
    // SAFETY: the script follows no address.
    unsafe { communicator.exchange(messages) }
}

#[test]
fn a_library_older_than_the_structs_is_refused() {
    script(|s| s.version = 21_602);
    let error = Library::new(FUNCTIONS, "an old file").unwrap_err();
    assert_eq!(error.to_string(), "an old file is NCCL 2.16.2; supported: 2.17.0 and later");
}

#[test]
fn a_group_is_begun_filled_ended_and_followed_and_a_communicator_left_in_order() {
    let mut communicator = join(1, 3).unwrap();
    let messages = [message(Way::Send, 2, 8), message(Way::Recv, 0, 8)];
    exchange(&mut communicator, &messages).unwrap();
    // SAFETY: the script follows no address.
    unsafe { communicator.all_gather(0, 0, 8) }.unwrap();
    communicator.finish().unwrap();
    assert_eq!(calls(), ["init", "start", "send", "recv", "end", "gather", "finalize", "destroy"]);
}

#[test]
fn a_rank_that_never_joins_ends_the_others_wait_at_the_deadline() {
    script(|s| s.polls = None);
    let begun = Instant::now();
    let error = join(0, 2).map(drop).unwrap_err();
    assert!(matches!(error, Error::TimedOut { call: "ncclCommInitRankConfig", .. }), "{error}");
    assert!(begun.elapsed() >= TIMEOUT);
    assert_eq!(calls(), ["init", "abort"]);
}

#[test]
fn a_frozen_peer_is_named_at_the_deadline_and_all_later_calls_are_refused_at_once() {
    let mut communicator = join(1, 3).unwrap();
    script(|s| s.polls = None);
    let messages = [message(Way::Send, 2, 8), message(Way::Recv, 0, 8)];
    let error = exchange(&mut communicator, &messages).unwrap_err().to_string();
    assert_eq!(error, "rank 1 of 3: exchange with ranks [2, 0] was not through within 60ms");
    let place = communicator.place();
    assert_eq!(exchange(&mut communicator, &messages), Err(Error::Aborted { place, call: "exchange" }));
    assert_eq!(communicator.finish(), Err(Error::Aborted { place, call: "finish" }));
    assert_eq!(calls(), ["init", "start", "send", "recv", "end", "abort"]);
}

#[test]
fn a_stream_that_stands_still_ends_a_wait_at_the_deadline() {
    let mut communicator = join(0, 1).unwrap();
    let error = communicator.wait_until::<Error>("wait", &[], || Ok(false)).unwrap_err();
    assert_eq!(error.to_string(), "rank 0 of 1: wait with all ranks was not through within 60ms");
    assert_eq!(calls(), ["init", "abort"]);
}

#[test]
fn a_fault_in_the_background_ends_a_wait_with_nccls_words() {
    let mut communicator = join(0, 2).unwrap();
    script(|s| s.background = REMOTE);
    let error = exchange(&mut communicator, &[message(Way::Send, 1, 8)]).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of 2: exchange failed: remote process exited");
    assert_eq!(calls(), ["init", "start", "send", "end", "abort"]);
}

#[test]
fn a_group_that_is_refused_halfway_is_ended_all_the_same() {
    let mut communicator = join(0, 2).unwrap();
    script(|s| s.refuses = Some(("send", INVALID_USAGE)));
    let messages = [message(Way::Send, 1, 8), message(Way::Recv, 1, 8)];
    let error = exchange(&mut communicator, &messages).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of 2: ncclSend or ncclRecv failed: invalid usage");
    // A thread that is left inside a group could never talk to NCCL again.
    assert_eq!(calls(), ["init", "start", "send", "end", "abort"]);
}

#[test]
fn a_group_that_is_not_begun_sends_nothing() {
    let mut communicator = join(0, 2).unwrap();
    script(|s| s.refuses = Some(("start", INVALID_USAGE)));
    let error = exchange(&mut communicator, &[message(Way::Send, 1, 8)]).unwrap_err().to_string();
    assert_eq!(error, "rank 0 of 2: ncclGroupStart failed: invalid usage");
    assert_eq!(calls(), ["init", "start", "abort"]);
}

#[test]
fn the_longest_timeout_is_no_overflow() {
    let mut communicator = join(0, 2).unwrap();
    communicator.set_timeout(Duration::MAX);
    exchange(&mut communicator, &[message(Way::Send, 1, 8)]).unwrap();
}

#[test]
fn what_would_hang_or_crash_nccl_is_refused_before_a_call_and_spoils_nothing() {
    let field = |error: Error| match error {
        Error::Unsupported { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(field(join(2, 2).map(drop).unwrap_err()), "place");
    assert_eq!(field(join(0, 0).map(drop).unwrap_err()), "place");
    let mut communicator = join(1, 2).unwrap();
    let mut refused = |messages: &[Message]| field(exchange(&mut communicator, messages).unwrap_err());
    assert_eq!(refused(&[message(Way::Send, 2, 8)]), "peer");
    assert_eq!(refused(&[message(Way::Recv, 1, 8)]), "messages");
    assert_eq!(refused(&[message(Way::Recv, 1, 8), message(Way::Send, 1, 16)]), "messages");
    exchange(&mut communicator, &[message(Way::Recv, 1, 8), message(Way::Send, 1, 8)]).unwrap();
    assert_eq!(calls(), ["init", "start", "recv", "send", "end"]);
}

#[test]
fn a_dropped_communicator_is_aborted_so_that_the_others_do_not_wait_for_it() {
    drop(join(0, 2).unwrap());
    assert_eq!(calls(), ["init", "abort"]);
}
