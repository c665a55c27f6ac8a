// What every library's script does: the same cases as in ../py/seen.py, told to the tests as JSON.
//
// A script gives `main` a maker for each API. A maker makes a client of one place ({url, model, headers}), with
// plain(question, tokens), streamed(question, tokens, most) and tools(question).

const CASE_SECONDS = 60;
const QUESTION = "Say something.";
const TOOL_QUESTION = "What is the weather in Oslo?";
const TOKENS = 20;
const ENDLESS = 10_000; // tokens of an answer that nobody waits for

const headersOf = (session, final) => ({
  "X-Dynamo-Session-ID": session,
  ...(final ? { "X-Dynamo-Session-Final": "true" } : {}),
});

const place = (orders, session, replica = 0, final = false) => ({
  url: orders.urls[replica],
  model: orders.model,
  headers: headersOf(session, final),
});

const odd = (orders, model, session) => ({ url: orders.odd, model, headers: headersOf(session) });

const CASES = {
  async abort(make, orders, session) {
    return { pieces: (await make(place(orders, session)).streamed(QUESTION, ENDLESS, 3)).length };
  },
  async plain(make, orders, session) {
    return { text: await make(place(orders, session)).plain(QUESTION, TOKENS) };
  },
  async streamed(make, orders, session) {
    return { pieces: await make(place(orders, session)).streamed(QUESTION, TOKENS, null) };
  },
  // Two clients, one at each replica; four turns in turn.
  async session(make, orders, session) {
    const clients = [0, 1].map((replica) => make(place(orders, session, replica)));
    for (const client of clients) await client.plain(QUESTION, TOKENS);
    for (const client of clients) await client.streamed(QUESTION, TOKENS, null);
    return {};
  },
  async final(make, orders, session) {
    await make(place(orders, session)).plain(QUESTION, TOKENS);
    return { text: await make(place(orders, session, 1, true)).plain(QUESTION, TOKENS) };
  },
  async final_streamed(make, orders, session) {
    await make(place(orders, session)).plain(QUESTION, TOKENS);
    return { pieces: await make(place(orders, session, 1, true)).streamed(QUESTION, TOKENS, null) };
  },
  async tools(make, orders, session) {
    return await make(odd(orders, "tools", session)).tools(TOOL_QUESTION);
  },
  async refused(make, orders, session) {
    return { text: await make(odd(orders, "refuse", session)).plain(QUESTION, TOKENS) };
  },
  async refused_streamed(make, orders, session) {
    return { pieces: await make(odd(orders, "refuse", session)).streamed(QUESTION, TOKENS, null) };
  },
  async lost(make, orders, session) {
    const lost = { url: orders.lost, model: orders.model, headers: headersOf(session) };
    return { text: await make(lost).plain(QUESTION, TOKENS) };
  },
  async cut(make, orders, session) {
    return { pieces: await make(odd(orders, "cut", session)).streamed(QUESTION, TOKENS, null) };
  },
};

class TooLong extends Error {}

async function within(seconds, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new TooLong(`not done after ${seconds} s`)), seconds * 1000);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

function told(error) {
  // Vercel's `ai` wraps what it tried several times.
  const cause = error?.lastError ?? error;
  return {
    type: error instanceof TooLong || error?.constructor === Error ? "builtins.Error" : String(error?.constructor?.name),
    message: String(error?.message ?? error),
    status: cause?.status ?? cause?.statusCode ?? null,
  };
}

export async function main(makers) {
  const write = process.stdout.write.bind(process.stdout);
  process.stdout.write = process.stderr.write.bind(process.stderr); // libraries print
  const orders = JSON.parse(process.argv[2]);
  const seen = {};
  for (const [family, sessions] of Object.entries(orders.sessions)) {
    seen[family] = {};
    for (const [name, session] of Object.entries(sessions)) {
      const begun = Date.now();
      let result;
      try {
        result = await within(CASE_SECONDS, CASES[name](makers[family], orders, session));
      } catch (error) {
        result = { error: told(error) };
      }
      seen[family][name] = { ...result, seconds: (Date.now() - begun) / 1000 };
    }
  }
  write(JSON.stringify(seen), () => process.exit(0));
}
