// Calls to the server, with the key that the page was given.  It is kept in memory alone: a reload forgets it.

export const ANSWER_MS = 5000;
const ACTION_MS = 60000;
export const trouble = { failures: 0 };
const held = { key: null };
const hooks = { done: () => {}, failed: () => {} };

export function setKey(key) { held.key = key; }
export const hasKey = () => held.key !== null;

// `done` runs after an action, `failed` gets the reason of one that was refused.
export function onAction(done, failed) { Object.assign(hooks, { done, failed }); }

const headers = () => held.key === null ? {} : { Authorization: `Bearer ${held.key}` };

export function ask(path) {
  return fetch(path, { headers: headers(), cache: "no-store", redirect: "error", signal: AbortSignal.timeout(ANSWER_MS) });
}

export async function get(path) {
  const response = await ask(path), body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
  return body;
}

// Ask the server for something; its refusal is shown until the next poll.
export async function post(path, body) {
  try {
    const response = await fetch(path, {
      method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body),
      redirect: "error", signal: AbortSignal.timeout(ACTION_MS),
    });
    if (!response.ok) throw new Error((await response.json())?.error?.message ?? `status ${response.status}`);
    hooks.done();
  } catch (error) {
    hooks.failed(error.message);
  }
}
